"""What runs other libraries' tests with Wyvern in the place of their operators: see ../peer_tests.py."""
