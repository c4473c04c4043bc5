"""The portable implementation: collectives, a sort and grouped GEMMs."""
