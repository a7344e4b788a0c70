"""loco: train one language model on several clusters that are far apart."""
