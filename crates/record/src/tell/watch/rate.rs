//! Bytes allocated per second, from a counter that only grows.

/// Shortest time between two looks, seconds: a shorter one would show the pattern of one step.
const SHORTEST: f64 = 0.4;

/// The rate of a counter.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rate {
    last: Option<(f64, u64)>,
    rate: Option<f64>,
}

impl Rate {
    /// Reads the counter; returns its rate per second from the second look on. A counter that went
    /// back (another process under the same name) starts over.
    pub fn look(&mut self, seconds: f64, counter: u64) -> Option<f64> {
        match self.last {
            Some((_, before)) if counter < before => {
                *self = Self { last: Some((seconds, counter)), rate: None }
            }
            Some((then, before)) if seconds - then >= SHORTEST => {
                self.rate = Some((counter - before) as f64 / (seconds - then));
                self.last = Some((seconds, counter));
            }
            Some(_) => {}
            None => self.last = Some((seconds, counter)),
        }
        self.rate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_known_from_the_second_look_on_and_not_from_looks_too_close() {
        let mut rate = Rate::default();
        assert_eq!(rate.look(10.0, 1000), None);
        assert_eq!(rate.look(10.1, 1500), None);
        assert_eq!(rate.look(12.0, 3000), Some(1000.0));
        assert_eq!(rate.look(12.1, 9000), Some(1000.0));
        assert_eq!(rate.look(13.0, 3000), Some(0.0));
        assert_eq!(rate.look(14.0, 10), None);
    }
}
