"""The cloud side: decides with the target model which draft tokens are right."""
