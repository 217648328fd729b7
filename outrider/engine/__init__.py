"""The engine's rooms: sequence, budget, scheduler, runner, engine. Import from the modules themselves."""
