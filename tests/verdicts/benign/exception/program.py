raise ValueError("mine")
