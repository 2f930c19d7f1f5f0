"""The frameworks that this policy works in, one package each; what they have in common is
`hosts.registry`.
"""
