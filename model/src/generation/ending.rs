//! Stop strings: where they end a text as it is generated.

/// A text as it is generated. Its end is held back while it may be the beginning of a stop string.
#[derive(Debug, Default)]
pub struct Ending {
    stop: Vec<String>,
    text: String,
    /// How many bytes of the text were handed out.
    told: usize,
    stopped: bool,
}

impl Ending {
    /// A text that ends before the first of these stop strings. Empty ones are ignored.
    pub fn new(stop: Vec<String>) -> Self {
        let stop = stop.into_iter().filter(|stop| !stop.is_empty()).collect();
        Self { stop, ..Self::default() }
    }

    /// Adds generated text, and returns what can be handed out now.
    pub fn add(&mut self, piece: &str) -> &str {
        self.text.push_str(piece);
        // No stop string begins in what was handed out.
        let new = &self.text[self.told..];
        let found = self.stop.iter().filter_map(|stop| new.find(stop.as_str())).min();
        if let Some(end) = found {
            self.text.truncate(self.told + end);
            self.stopped = true;
        }
        let held = if self.stopped { 0 } else { begun(&self.text, &self.stop) };
        self.tell(self.text.len() - held)
    }

    /// Returns what was held back, once nothing more comes.
    pub fn rest(&mut self) -> &str {
        self.tell(self.text.len())
    }

    fn tell(&mut self, end: usize) -> &str {
        let end = end.max(self.told).min(self.text.len());
        let from = std::mem::replace(&mut self.told, end).min(end);
        &self.text[from..end]
    }

    /// Whether a stop string has ended the text.
    pub fn stopped(&self) -> bool {
        self.stopped
    }
    /// The whole text so far, with what is held back.
    pub fn text(&self) -> &str {
        &self.text
    }
}

/// How many bytes at the end of a text may be the beginning of a stop string.
fn begun(text: &str, stop: &[String]) -> usize {
    let begins = |stop: &String| {
        let starts = stop.char_indices().map(|(at, _)| at).skip(1);
        starts.filter(|at| text.ends_with(&stop[..*at])).max().unwrap_or(0)
    };
    stop.iter().map(begins).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_that_may_begin_a_stop_string_is_held_back() {
        let mut ending = Ending::new(vec!["END".to_owned(), "€ur".to_owned(), String::new()]);
        let pieces = ["a E", "N", "X b €", "u", "n EN"].map(|piece| ending.add(piece).to_owned());
        assert_eq!(pieces, ["a ", "", "ENX b ", "", "€un "]);
        assert_eq!(ending.add("D more"), "");
        assert!(ending.stopped());
        assert_eq!(ending.rest(), "");
        assert_eq!(ending.text(), "a ENX b €un ");
        let mut ending = Ending::new(vec!["END".to_owned()]);
        assert_eq!(ending.add("EN"), "");
        assert_eq!(ending.rest(), "EN");
    }
}
