"""The structure of a torch model: its captured program, its layers and their connections."""
