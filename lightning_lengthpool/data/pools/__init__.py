"""A worker's pool: samples come in, slots leave."""
