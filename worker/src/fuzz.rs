//! Single decoders of the control service, for the fuzz targets: not part of the interface.

use crate::{burst, error::WorkerError, execute::CheckedRequest, place::Request};
use galaxy_common::{BatchShape, DeviceName, Plan, Rank};
use galaxy_proto::v1;
use std::{sync::Arc, time::Duration};
use tonic::Status;

/// The plan of a request for a placement on device `own`, and its rank there.
///
/// # Errors
/// As the `Place` call.
pub fn place(own: &DeviceName, request: v1::PlaceRequest) -> Result<(Arc<Plan>, Rank), Status> {
    let read = Request::read(own, true, request);
    read.map(|r| (r.plan, r.rank)).map_err(|error| error.into_status(own))
}

/// The batch of a request for an execution, its tokens, and the time that is left for it.
///
/// # Errors
/// As the `Execute` call.
pub fn execute(
    own: &DeviceName,
    request: v1::ExecuteRequest,
) -> Result<(BatchShape, Vec<u32>, Duration), Status> {
    let read = |request| {
        let (asked, rows) = CheckedRequest::read(request)?;
        // The settings of sequences that begin, checked for a vocabulary that is small.
        for (text, _) in asked.begins {
            burst::checked(text, 97)?;
        }
        Ok::<_, WorkerError>((asked.shape, rows.tokens, asked.left))
    };
    read(request).map_err(|error| error.into_status(own))
}
