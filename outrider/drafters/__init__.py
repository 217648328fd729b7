"""One leaf per drafting method; nobody imports a leaf by name, the registry finds it."""
