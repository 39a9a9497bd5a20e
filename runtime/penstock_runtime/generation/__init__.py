"""Text generation: the engines that compute steps, and what schedules, samples and decodes above them."""
