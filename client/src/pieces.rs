//! Puts the pieces of a raw result together.

use crate::{
    answer::{Report, Tensor, floats},
    error::ClientError,
};
use galaxy_proto::v1::{self, run_event::Event};

/// The largest raw result we take: a bound on what a coordinator can make us allocate in all.
const MAX_RESULT_BYTES: u64 = 16 << 30;

/// A raw result as it comes in, piece by piece. Never holds more than the coordinator really sent.
pub(crate) struct Pieces {
    count: usize,
    done: Vec<Tensor>,
    open: Option<(v1::TensorHead, u64, Vec<u8>)>,
    bytes: u64,
    report: Option<v1::RequestReport>,
}

impl Pieces {
    pub(crate) fn new(count: usize) -> Self {
        Self { count, done: Vec::new(), open: None, bytes: 0, report: None }
    }

    /// Whether the last piece has come.
    pub(crate) fn ended(&self) -> bool {
        self.report.is_some()
    }

    pub(crate) fn take(&mut self, event: Event) -> Result<(), ClientError> {
        let malformed = |what: String| ClientError::Malformed { what };
        match event {
            Event::Tensor(head) => {
                self.close()?;
                if head.sequence as usize >= self.count {
                    return Err(malformed(format!(
                        "a tensor of sequence {}, of {}",
                        head.sequence, self.count
                    )));
                }
                let wanted = head
                    .shape
                    .iter()
                    .try_fold(4u64, |n, &axis| n.checked_mul(u64::from(axis)))
                    .and_then(|n| self.bytes.checked_add(n).map(|sum| (n, sum)))
                    .filter(|&(_, sum)| sum <= MAX_RESULT_BYTES);
                let Some((wanted, sum)) = wanted else {
                    return Err(malformed(format!("a tensor of shape {:?}", head.shape)));
                };
                self.bytes = sum;
                self.open = Some((head, wanted, Vec::new()));
            }
            Event::Data(data) => {
                let Some((head, wanted, held)) = &mut self.open else {
                    return Err(malformed("data before its tensor".to_owned()));
                };
                if held.len() as u64 + data.len() as u64 > *wanted {
                    return Err(malformed(format!("too much data for shape {:?}", head.shape)));
                }
                held.extend_from_slice(&data);
            }
            Event::Report(report) => {
                self.close()?;
                self.report = Some(report);
            }
        }
        Ok(())
    }

    fn close(&mut self) -> Result<(), ClientError> {
        if let Some((head, wanted, held)) = self.open.take() {
            if held.len() as u64 != wanted {
                return Err(ClientError::Malformed {
                    what: format!("{} bytes for shape {:?}", held.len(), head.shape),
                });
            }
            let values = floats(&held);
            self.done.push(Tensor { sequence: head.sequence, shape: head.shape, values });
        }
        Ok(())
    }

    pub(crate) fn finish(mut self) -> Result<(Vec<Tensor>, Report), ClientError> {
        self.close()?;
        self.done.sort_by_key(|t| t.sequence);
        let complete = self.done.iter().map(|t| t.sequence as usize).eq(0..self.count);
        if !complete {
            return Err(ClientError::Malformed {
                what: format!("{} tensors for {} sequences", self.done.len(), self.count),
            });
        }
        Ok((self.done, report(self.report)?))
    }
}

/// The report of a reply.
pub(crate) fn report(wire: Option<v1::RequestReport>) -> Result<Report, ClientError> {
    wire.map(Report::from)
        .ok_or_else(|| ClientError::Malformed { what: "it has no report".to_owned() })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use galaxy_common::RequestId;

    fn head(sequence: u32, shape: &[u32]) -> Event {
        Event::Tensor(v1::TensorHead { sequence, shape: shape.to_vec() })
    }
    fn data(values: &[f32]) -> Event {
        Event::Data(values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }
    fn last() -> Event {
        Event::Report(v1::RequestReport { request: 7, ..Default::default() })
    }

    #[test]
    fn pieces_become_tensors_in_order() {
        let mut pieces = Pieces::new(2);
        for event in [head(1, &[1, 2]), data(&[5.0]), data(&[6.0]), head(0, &[0, 2]), last()] {
            pieces.take(event).unwrap();
        }
        let (tensors, report) = pieces.finish().unwrap();
        assert_eq!(tensors[0].shape, [0, 2]);
        assert_eq!(tensors[1].values, [5.0, 6.0]);
        assert_eq!(report.requests, [RequestId(7)]);
    }

    #[test]
    fn malformed_pieces_are_errors() {
        let wrong: [(usize, Vec<Event>); 7] = [
            (1, vec![data(&[1.0])]),
            (1, vec![head(1, &[1])]),
            (1, vec![head(0, &[1]), data(&[1.0, 2.0])]),
            (1, vec![head(0, &[2]), data(&[1.0]), last()]),
            (1, vec![head(0, &[u32::MAX, u32::MAX, u32::MAX])]),
            (2, vec![head(0, &[1]), data(&[1.0]), last()]),
            (1, vec![head(0, &[1]), data(&[1.0])]),
        ];
        for (count, events) in wrong {
            let mut pieces = Pieces::new(count);
            let outcome = events.into_iter().try_for_each(|e| pieces.take(e));
            let outcome = outcome.and_then(|()| pieces.finish().map(drop));
            assert!(matches!(outcome, Err(ClientError::Malformed { .. })));
        }
    }
}
