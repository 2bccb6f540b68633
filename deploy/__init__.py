"""Run the app across sites: certificates, node keys, the server, the sites, and a check."""
