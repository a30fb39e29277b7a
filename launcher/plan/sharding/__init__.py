"""How arrays are cut over the devices of a submesh: rules, named dimensions, specs, the search."""
