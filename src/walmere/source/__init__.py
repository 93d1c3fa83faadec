"""The public data source `format("pgoutput")`: the changes of a publication as rows of a DataFrame."""
