"""The search behind `auto`: what layers cost, which stages they make, and which plan is best."""
