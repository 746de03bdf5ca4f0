"""The peers: of each its rows, and in the dataclass `Setup` what a row says of a run. No peer is imported here."""
