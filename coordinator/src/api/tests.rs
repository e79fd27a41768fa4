#![allow(clippy::unwrap_used)]

use super::*;
use crate::{client_memory::ClientMemory, session::Tensor};
use galaxy_common::{Assignment, BlockAssignment, Bytes, DeviceName, DevicePlan, Span};

fn header(text: &str) -> Result<Option<Duration>, Status> {
    let mut metadata = MetadataMap::new();
    metadata.insert("grpc-timeout", text.parse().unwrap());
    timeout(&metadata)
}

#[test]
fn grpc_timeouts_of_callers_are_parsed() {
    assert_eq!(timeout(&MetadataMap::new()).unwrap(), None);
    assert_eq!(header("200m").unwrap(), Some(Duration::from_millis(200)));
    assert_eq!(header("99999999H").unwrap(), Some(Duration::from_secs(99_999_999 * 3600)));
    for bad in ["", "S", "1", "1x", "-1S", "123456789S", "+1S"] {
        assert!(header(bad).is_err(), "{bad}");
    }
}

#[tokio::test]
async fn results_that_a_client_does_not_read_are_dropped() {
    let memory = ClientMemory::new(Bytes(PIECE as u64 * 4));
    let held = memory.caller(None);
    held.grow(PIECE as u64 * 4).unwrap();
    let tensor = Tensor { shape: vec![PIECE as u32], values: vec![0.0; PIECE] };
    let done = Tensors { tensors: vec![tensor], report: Report::default(), held };
    let (sender, mut receiver) = mpsc::channel(1);
    send(sender, done, Duration::from_millis(1)).await;
    assert_eq!(memory.held(&None), Bytes(0));
    assert!(receiver.recv().await.is_some());
    assert!(receiver.recv().await.is_none(), "no report");
}

#[test]
fn the_status_of_a_later_pipeline_stage_has_its_heads_and_columns() {
    let nothing =
        BlockAssignment { layers: Span::new(0, 2), heads: Span::empty(), columns: Span::empty() };
    let all = BlockAssignment {
        layers: Span::new(2, 4),
        heads: Span::first(12),
        columns: Span::first(48),
    };
    let blocks = vec![nothing, all];
    let part = Assignment { blocks, row_weight: 1, vocabulary: Span::empty() };
    let part = DevicePlan {
        name: DeviceName::new("second").unwrap(),
        budget: Bytes(1),
        threads: 1,
        prefill: part.clone(),
        decode: part,
        streaming: None,
    };
    let status = device(DeviceView { part: Some(part), ..DeviceView::default() });
    assert_eq!((status.heads_to, status.columns_to), (12, 48));
}

#[test]
fn an_embed_request_with_a_prompt_and_a_prompt_name_is_refused() {
    let mut request = v1::EmbedRequest { prompt: Some("p".into()), ..Default::default() };
    assert_eq!(embed(request.clone()).unwrap().prefix, Some(Prefix::Text("p".into())));
    request.prompt_name = Some("query".into());
    assert!(embed(request.clone()).is_err());
    request.prompt = None;
    request.dimensions = 8;
    let embed = embed(request).unwrap();
    assert_eq!(embed.prefix, Some(Prefix::Named("query".into())));
    assert_eq!(embed.dimensions, NonZeroU32::new(8));
}

#[test]
fn a_run_request_with_two_kinds_of_output_is_refused() {
    let mut request = v1::RunRequest { sequences: vec![], output: 0, pooled: true };
    assert_eq!(output(&request).unwrap(), RunOutput::Sentence);
    request.output = v1::Wanted::Hidden.into();
    assert!(output(&request).is_err());
    request.pooled = false;
    assert_eq!(output(&request).unwrap(), RunOutput::Wanted(Wanted::Hidden));
    request.output = 99;
    assert!(output(&request).is_err());
}
