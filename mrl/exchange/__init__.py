"""Exchange between ranks: samples and their routes move from the ranks that rolled them out to the
ranks that train on them."""
