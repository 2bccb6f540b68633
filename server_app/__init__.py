"""The ServerApp: run config in, strategy started, results written."""
