"""Recording a layer in forward, and replaying it in backward."""
