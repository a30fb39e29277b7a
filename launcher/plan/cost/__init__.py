"""The cost model: seconds, bytes moved and memory of stages and meshes."""
