"""The Python layer of Faster R-CNN's region proposal network."""
