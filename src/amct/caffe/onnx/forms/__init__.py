"""The ONNX form of each Caffe layer: one function per type, one module per family.

A form is registered for a layer class (and its subclasses) and writes the nodes of one layer::

    @onnx_form(Sigmoid)
    def sigmoid(place: Place[Sigmoid]) -> None:
        place.top("Sigmoid", place.bottom)

A layer class outside this package may define a method ``to_onnx(self, place)`` instead, which takes precedence. A layer
without a form can run and be quantized, but not be exported to ONNX.
"""
