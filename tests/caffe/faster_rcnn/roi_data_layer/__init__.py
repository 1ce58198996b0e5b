"""The Python data layer that Faster R-CNN's train prototxts name."""
