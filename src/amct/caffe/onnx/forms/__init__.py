"""The ONNX form of each Caffe layer: one function per type, one module per family.

A form is registered for a layer class (subclasses have it too) and writes the nodes of one layer::

    @onnx_form(Sigmoid)
    def sigmoid(place: Place[Sigmoid]) -> None:
        place.top("Sigmoid", place.bottom)

A layer class written outside this package may define a method ``to_onnx(self, place)`` instead, which comes first.
Layers without a form can run and be quantized, only the ONNX export refuses them.
"""
