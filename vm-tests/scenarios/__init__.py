"""One module per scenario. Each has TITLE, LIMIT_S (wall limit) and run(world)."""
