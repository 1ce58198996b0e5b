"""The simple config (``.cfg``): its blocks, the algorithms inside them, and the layer names it lists."""
