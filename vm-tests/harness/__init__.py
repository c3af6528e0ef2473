"""What the VM scenarios stand on: a guest, its image, a Rimrock, and a real model."""
