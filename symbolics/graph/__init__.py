"""An onnx_ir graph in the hand: values, walks, copies, the builder of new nodes, shapes."""
