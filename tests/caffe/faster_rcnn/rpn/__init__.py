"""The Python layers that Faster R-CNN's prototxts name, as small as they can be."""
