"""Reading weights where they are in host memory, in place of uploading them (MemFerry), as a plan."""
