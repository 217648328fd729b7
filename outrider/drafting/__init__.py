"""What every drafter shares: the protocol, the registry. Import from the modules themselves."""
