"""The check of written files: loads and runs them, compares their outputs, and measures their speed.

===================  ===================================================================================================
``checking.py``      the ONNX files of one save, one after the other
``running.py``       a model as a user's program loads it; costliest nodes; the median time of several models
``parts.py``         a large model in parts, of which one is loaded at a time
``similarity.py``    cosine and SQNR of the outputs of two models
``reference.py``     what a file is compared with, and how much worse than the simulation it may be
``batch.py``         the inputs: a calibration batch kept beside the record, or random numbers
``integers.py``      a deploy file in standard integer operators
``locating.py``      the first tensor at which a file is worse than the simulation
``repair.py``        a fast QDQ file whose worst tensors stay float
``child.py``         files of large models, in a process of their own
``outcome.py``       the result, and what is said about it
===================  ===================================================================================================
"""
