"""What tests of the engine share: a tiny target, drafters that follow a script, and the books that must balance."""
