"""Many runs, and the tables made from them."""
