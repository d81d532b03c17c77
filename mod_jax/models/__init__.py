"""The model: layers, attention, blocks, decoder. Modules hold parameters and children only."""
