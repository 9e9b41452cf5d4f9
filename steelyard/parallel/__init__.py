"""Many ranks as one job: who they are, how they meet, and how they share the work."""
