"""Problems with verifiable answers, and the tokenizer that turns their prompts into token ids."""
