"""How arrays are cut over the devices of a submesh, and moved between submeshes."""
