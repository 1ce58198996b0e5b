"""How a forward pass is run: the steps (``plan``), fused layers (``fusion``), a pass without blobs (``bound_plan``)."""
