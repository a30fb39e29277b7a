"""Shard arrays over the devices of a submesh, and move them between submeshes."""
