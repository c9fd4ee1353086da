from zoo import ops, layers
