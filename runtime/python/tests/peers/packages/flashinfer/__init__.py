"""What FlashInfer's tests of the gated delta rule import, served by Wyvern."""
