"""AMCT's modules of its file formats, as protoc would generate them."""
