//! Messages on a stream: each follows its length.

use super::{
    malformed::{MAX_BYTES, Malformed},
    message::Message,
};
use std::io;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Why no message is received or sent.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The stream fails or ends.
    #[error("the connection broke off: {0}")]
    Io(#[from] io::Error),
    /// The bytes that came are no message.
    #[error("the other side sent {0}")]
    Malformed(#[from] Malformed),
}

/// Receives the next message.
///
/// # Errors
/// When the stream ends, or what comes is no message.
pub async fn receive(stream: &mut (impl AsyncRead + Unpin)) -> Result<Message, WireError> {
    let length = usize::from(stream.read_u16().await?);
    if length > MAX_BYTES {
        return Err(Malformed::Long.into());
    }
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes).await?;
    Ok(Message::decode(&bytes)?)
}

/// Sends a message.
///
/// # Errors
/// When the stream fails, or the message has more bytes than the other side takes.
pub async fn send(
    stream: &mut (impl AsyncWrite + Unpin),
    message: &Message,
) -> Result<(), WireError> {
    let bytes = message.encode();
    let length = u16::try_from(bytes.len()).ok().filter(|length| usize::from(*length) <= MAX_BYTES);
    stream.write_u16(length.ok_or(Malformed::Long)?).await?;
    stream.write_all(&bytes).await?;
    Ok(stream.flush().await?)
}
