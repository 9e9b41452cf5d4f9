"""How ranks are started, and how they all end when one does."""
