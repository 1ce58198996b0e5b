"""What a torch model is made of: its captured program, its layers, and what feeds what."""
