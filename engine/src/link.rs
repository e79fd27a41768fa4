//! The link trait: how tiles get from one device to the next, and its in-memory form.
//!
//! A link carries frames one way, in order, from one device to one other. Its two ends are driven
//! by the send lane and the receive lane of an executor, each an I/O thread of its own that sleeps
//! when there is nothing to do; so the trait blocks. A third handle closes it from anywhere.

use galaxy_common::{FrameError, FrameHeader, Rank};
use std::sync::Arc;

/// Why a link failed.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The other end is gone, or we closed it.
    #[error("the link is closed")]
    Closed,
    /// The transport failed.
    #[error("the link failed: {0}")]
    Io(#[from] std::io::Error),
    /// The peer sent bytes that are no frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The payload does not fill the room that the program has for it.
    #[error("the frame carries {got} bytes, and there is room for {room}")]
    Length {
        /// The bytes of the frame's payload.
        got: usize,
        /// The bytes that the program has room for.
        room: usize,
    },
    /// The peer sent a frame that the program does not have here.
    #[error("expected transfer {} of sequence {} epoch {}, got transfer {} of sequence {} epoch {}",
        wanted.transfer, wanted.sequence, wanted.epoch, got.transfer, got.sequence, got.epoch)]
    Unexpected {
        /// The header of the frame that the program has here.
        wanted: Box<FrameHeader>,
        /// The header of the frame that came.
        got: Box<FrameHeader>,
    },
}

/// The sending end of a link.
pub trait LinkSender: Send {
    /// Sends one frame: returns when the transport has taken all of it.
    ///
    /// # Errors
    /// When the link is closed or fails; it is of no further use then.
    fn send(&mut self, header: &FrameHeader, payload: &[u8]) -> Result<(), LinkError>;

    /// Bytes of payload that it takes without waiting for the receiver to take some. Whoever sends no more
    /// before it receives may do both on one thread.
    fn takes(&self) -> u64 {
        0
    }
}

/// The receiving end of a link.
pub trait LinkReceiver: Send {
    /// Receives the frame that `wanted` describes, into `payload` of `wanted.payload` bytes.
    ///
    /// Frames of an older epoch or sequence number are dropped unread.
    ///
    /// # Errors
    /// When the link is closed or fails, or another frame comes.
    fn receive(&mut self, wanted: &FrameHeader, payload: &mut [u8]) -> Result<(), LinkError>;
}

/// Closes a link from any thread; both ends then return [`LinkError::Closed`] or an I/O error.
pub trait LinkCloser: Send + Sync {
    /// Closes the link.
    fn close(&self);
}

/// The links of one device for one epoch.
#[derive(Default)]
pub struct Links {
    /// The sending ends, each with the rank of its peer.
    pub senders: Vec<(Rank, Box<dyn LinkSender>)>,
    /// The receiving ends, each with the rank of its peer.
    pub receivers: Vec<(Rank, Box<dyn LinkReceiver>)>,
    /// The handles that close all of these links.
    pub closers: Vec<Arc<dyn LinkCloser>>,
}

/// Decides what to do with a frame that arrived while `wanted` was expected.
///
/// # Errors
/// [`LinkError::Unexpected`] when it is neither the frame nor a stale one.
pub fn accept(wanted: &FrameHeader, got: &FrameHeader) -> Result<Accept, LinkError> {
    if got == wanted {
        Ok(Accept::Take)
    } else if (got.epoch, got.sequence) < (wanted.epoch, wanted.sequence) {
        Ok(Accept::Drop)
    } else {
        Err(LinkError::Unexpected { wanted: Box::new(*wanted), got: Box::new(*got) })
    }
}

/// What to do with a frame that arrived.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Accept {
    /// Take it: it is the expected one.
    Take,
    /// Read over it: it is stale.
    Drop,
}

/// A link between two executors of one process.
pub mod memory {
    use super::{Accept, LinkCloser, LinkError, LinkReceiver, LinkSender, accept};
    use galaxy_common::FrameHeader;
    use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

    /// One frame in flight: sender and receiver meet, as on the narrowest link there can be.
    #[derive(Default)]
    struct Pipe {
        state: Mutex<LinkState>,
        changed: Condvar,
    }
    #[derive(Default)]
    struct LinkState {
        header: Option<FrameHeader>,
        payload: Vec<u8>,
        closed: bool,
    }
    impl Pipe {
        fn lock(&self) -> MutexGuard<'_, LinkState> {
            self.state.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }
    struct End(Arc<Pipe>);

    /// Creates a link: its sending end, its receiving end, and the handle that closes it.
    pub fn link() -> (Box<dyn LinkSender>, Box<dyn LinkReceiver>, Arc<dyn LinkCloser>) {
        let pipe = Arc::new(Pipe::default());
        (Box::new(End(pipe.clone())), Box::new(End(pipe.clone())), Arc::new(End(pipe)))
    }

    impl LinkSender for End {
        fn send(&mut self, header: &FrameHeader, payload: &[u8]) -> Result<(), LinkError> {
            let mut state = self.0.lock();
            while state.header.is_some() && !state.closed {
                state = self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            if state.closed {
                return Err(LinkError::Closed);
            }
            state.payload.clear();
            state.payload.extend_from_slice(payload);
            state.header = Some(*header);
            self.0.changed.notify_all();
            Ok(())
        }
    }
    impl LinkReceiver for End {
        fn receive(&mut self, wanted: &FrameHeader, payload: &mut [u8]) -> Result<(), LinkError> {
            let mut state = self.0.lock();
            loop {
                if let Some(got) = state.header {
                    let verdict = accept(wanted, &got)?;
                    state.header = None;
                    self.0.changed.notify_all();
                    if verdict == Accept::Drop {
                        continue;
                    }
                    let (got, room) = (state.payload.len(), payload.len());
                    if got != room {
                        return Err(LinkError::Length { got, room });
                    }
                    payload.copy_from_slice(&state.payload);
                    return Ok(());
                } else if state.closed {
                    return Err(LinkError::Closed);
                } else {
                    state = self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }
    impl LinkCloser for End {
        fn close(&self) {
            self.0.lock().closed = true;
            self.0.changed.notify_all();
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{LinkError, memory};
    use galaxy_common::{Epoch, FrameHeader, SequenceNumber, WireType};

    #[test]
    fn a_stale_frame_is_dropped_and_a_wrong_payload_length_is_an_error() {
        let header = |sequence| FrameHeader {
            epoch: Epoch(1),
            sequence: SequenceNumber(sequence),
            transfer: 0,
            tile: 0,
            wire: WireType::F32,
            payload: 8,
        };
        let (mut sender, mut receiver, _) = memory::link();
        let sending = std::thread::spawn(move || {
            sender.send(&header(1), &[1; 8]).unwrap();
            sender.send(&header(2), &[2; 8]).unwrap();
            sender.send(&header(3), &[3; 4]).unwrap();
        });
        let mut payload = [0; 8];
        receiver.receive(&header(2), &mut payload).unwrap();
        assert_eq!(payload, [2; 8], "the stale frame is dropped");
        let error = receiver.receive(&header(3), &mut payload).unwrap_err();
        assert!(matches!(error, LinkError::Length { got: 4, room: 8 }), "{error}");
        sending.join().unwrap();
    }
}
