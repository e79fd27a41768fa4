//! Messages of the control services, and the values that they are converted into.

use super::{Input, good, said};
use galaxy_client::{ClusterStatus, Trace};
use galaxy_common::{
    Assignment, BatchShape, BlockAssignment, Bytes, Cache, DeviceName, DevicePlan, Epoch, Exchange,
    Layout, LinkProfile, LinkType, Mode, Modes, Plan, SequenceNumber, Span, Strategy, Wanted,
    WireType, plan::Phase,
};
use galaxy_coord::{fleet::Timeline, trace::TracedProgram};
use galaxy_model::Formats;
use galaxy_proto::v1;
use prost::Message;
use std::{sync::Arc, time::Duration};
use tonic::metadata::MetadataMap;

/// What a coordinator asks of a worker, whose name is "pi-1".
pub(crate) fn worker(bytes: &[u8]) {
    let mut input = Input(bytes);
    let own = name(1);
    match input.byte() % 8 {
        0 => read(input.0, |request: v1::PlaceRequest| {
            match galaxy_worker::fuzz::place(&own, request) {
                Ok((plan, rank)) => assert_eq!(plan.ring[rank.index()].name, own),
                Err(status) => said(&galaxy_proto::fault::from_status(&status)),
            }
        }),
        1 => read(input.0, |request: v1::ExecuteRequest| {
            match galaxy_worker::fuzz::execute(&own, request) {
                Ok((shape, tokens, left)) => {
                    // The model says how many there must be: of images there are none.
                    assert!(tokens.is_empty() || shape.segments().len() <= tokens.len());
                    assert!(left <= Duration::from_secs(3600));
                }
                Err(status) => said(&galaxy_proto::fault::from_status(&status)),
            }
        }),
        2 => read(input.0, |request: v1::ProbeRequest| {
            let peer = request.peer.unwrap_or_default();
            good(DeviceName::new(peer.name));
        }),
        3 => read(input.0, |_: v1::ProfileRequest| {}),
        4 => read(input.0, |_: v1::TimelineRequest| {}),
        5 => read(input.0, |_: v1::CancelRequest| {}),
        6 => read(input.0, |_: v1::DescribeRequest| {}),
        _ => read(input.0, |_: v1::DrainRequest| {}),
    }
}

/// What clients ask of a coordinator, and what workers answer the coordinator.
pub(crate) fn coordinator(bytes: &[u8]) {
    let mut input = Input(bytes);
    match input.byte() % 11 {
        0 => read(input.0, |request: v1::RunRequest| {
            good(galaxy_coord::fuzz::output(&request));
        }),
        1 => {
            let Ok(value) = input.0.try_into() else { return };
            let mut metadata = MetadataMap::new();
            metadata.insert("grpc-timeout", value);
            good(galaxy_coord::fuzz::timeout(&metadata));
        }
        2 => take(&mut input),
        3 => trace(&mut input),
        4 => probed(&mut input),
        5 => read(input.0, |_: v1::EmbedRequest| {}),
        6 => read(input.0, |_: v1::ClassifyRequest| {}),
        7 => read(input.0, |_: v1::PlaceEvent| {}),
        8 => read(input.0, |_: v1::DescribeReply| {}),
        9 => read(input.0, |_: v1::HealthReply| {}),
        _ => read(input.0, |_: v1::ProfileEvent| {}),
    }
}

/// What a coordinator answers a client.
pub(crate) fn client(bytes: &[u8]) {
    let mut input = Input(bytes);
    match input.byte() % 6 {
        0 => {
            let count = usize::from(input.byte() % 4);
            let events: Vec<v1::RunEvent> = messages(&mut input);
            let events = events.into_iter().filter_map(|event| event.event).collect();
            match galaxy_client::fuzz::pieces(count, events) {
                Ok((tensors, _)) => {
                    assert_eq!(tensors.len(), count);
                    for tensor in tensors {
                        let values: u64 = tensor.shape.iter().map(|&n| u64::from(n)).product();
                        assert_eq!(tensor.values.len() as u64, values);
                    }
                }
                Err(error) => said(&error),
            }
        }
        1 => {
            let texts = usize::from(input.byte());
            read(input.0, |reply: v1::EmbedReply| {
                rows(&reply.vectors, texts, reply.width as usize);
            });
        }
        2 => {
            let texts = usize::from(input.byte());
            read(input.0, |reply: v1::ClassifyReply| {
                rows(&reply.logits, texts, reply.labels.len());
                rows(&reply.probabilities, texts, reply.labels.len());
            });
        }
        3 => read(input.0, |reply: v1::StatusReply| {
            serde_json::to_vec(&ClusterStatus::from(reply)).expect("a status has a JSON form");
        }),
        4 => read(input.0, |reply: v1::TraceReply| {
            let trace = Trace::from(reply);
            let rate = "125Mbit/s".parse().expect("a rate");
            let hidden = |share: Option<f64>| assert!(share.is_none_or(f64::is_finite));
            hidden(trace.hidden(rate));
            for device in &trace.devices {
                hidden(device.hidden(rate));
                serde_json::to_vec(device).expect("a trace has a JSON form");
            }
        }),
        _ => {
            let report = galaxy_client::fuzz::reports(messages(&mut input));
            serde_json::to_vec(&report).expect("a report has a JSON form");
        }
    }
}

/// Decodes a message, hands it to `then`, and checks that what is encoded of it decodes again. Only one
/// message is held at a time.
fn read<M: Message + Default>(bytes: &[u8], then: impl FnOnce(M)) {
    match M::decode(bytes) {
        Ok(message) => {
            let written = message.encode_to_vec();
            then(message);
            let again = M::decode(written.as_slice()).expect("its own");
            // By bytes: NaNs differ from themselves.
            assert_eq!(again.encode_to_vec(), written);
        }
        Err(error) => said(&error),
    }
}

/// Messages one behind another, each behind its length; pieces that do not decode are left out.
pub(crate) fn messages<M: Message + Default>(input: &mut Input<'_>) -> Vec<M> {
    let mut messages = Vec::new();
    while !input.is_empty() {
        messages.extend(M::decode(input.piece()).ok());
    }
    messages
}

fn rows(bytes: &[u8], count: usize, width: usize) {
    match galaxy_client::fuzz::rows(bytes, count, width) {
        Ok(rows) => assert!(rows.len() == count && rows.iter().all(|row| row.len() == width)),
        Err(error) => said(&error),
    }
}

/// Takes pieces of a device's results.
fn take(input: &mut Input<'_>) {
    let sizes = [3, 0, 40];
    let mut values: Vec<Vec<f32>> = sizes.iter().map(|n| Vec::with_capacity(*n)).collect();
    let events: Vec<v1::ExecuteEvent> = messages(input);
    for event in events.into_iter().filter_map(|event| event.event) {
        if let v1::execute_event::Event::Piece(piece) = event
            && let Err(status) = galaxy_coord::fuzz::take(&mut values, &sizes, &piece)
        {
            said(&status);
        }
    }
    assert!(values.iter().zip(sizes).all(|(values, size)| values.len() <= size));
}

/// Merges the timelines that two devices report.
fn trace(input: &mut Input<'_>) {
    let spec = galaxy_model::shape::Shape::bert(1, 32, 2).spec().expect("a BERT");
    let plan = Arc::new(two_devices());
    let shape = BatchShape::single(2, Wanted::Hidden).expect("two rows");
    let programs = galaxy_graph::lower(&spec, &Formats::default(), &plan, Phase::Prefill, &shape)
        .expect("a plan that was checked");
    let mut timelines = Vec::new();
    for program in &programs {
        let offset_ns = input.long() as i64;
        let reply = v1::TimelineReply::decode(input.piece()).unwrap_or_default();
        let mut operations: Vec<_> = reply.start_ns.into_iter().zip(reply.end_ns).collect();
        // A device that answers for fewer operations than there are is refused.
        if input.flag() {
            operations.resize(program.operations.len(), (0, 0));
        }
        timelines.push(Timeline { operations, offset_ns });
    }
    let (epoch, sequence) = (Epoch(1), SequenceNumber(1));
    let traced = TracedProgram { epoch, sequence, plan, phase: Phase::Prefill, shape };
    match galaxy_coord::fuzz::trace(&spec, vec![(traced, timelines)]) {
        Ok(trace) => {
            let json = serde_json::from_str::<serde_json::Value>(&trace.chrome_json);
            json.expect("a trace is JSON");
        }
        Err(error) => said(&error),
    }
}

fn two_devices() -> Plan {
    let part = |from: u32| {
        let block = BlockAssignment {
            layers: Span::first(1),
            heads: Span::new(from, from + 1),
            columns: Span::new(from * 64, from * 64 + 64),
        };
        Assignment { blocks: vec![block], row_weight: 1, vocabulary: Span::empty() }
    };
    let device = |from: u32| DevicePlan {
        name: name(from),
        budget: Bytes(u64::MAX),
        threads: 1,
        prefill: part(from),
        decode: part(from),
        streaming: None,
    };
    Plan {
        model: "m".into(),
        fingerprint: "f".into(),
        strategy: Strategy::Galaxy,
        layout: Layout::Ring,
        modes: Modes::uniform(1, Mode::Tensor),
        exchange: Exchange::Ring,
        link: LinkType::Tls,
        wire: WireType::F32,
        activations: galaxy_common::Activations::default(),
        tiles: 1,
        max_rows: 8,
        cache: Cache::NONE,
        ring: vec![device(0), device(1)],
    }
}

/// Checks the profile that a probe's reply gives.
fn probed(input: &mut Input<'_>) {
    let reply = v1::ProbeReply::decode(input.piece()).unwrap_or_default();
    let profile = galaxy_coord::fuzz::link_profile((name(0), name(1)), LinkType::Tls, &reply);
    match profile.check() {
        Ok(()) => {
            let text = serde_json::to_vec(&profile).expect("a profile has a JSON form");
            assert_eq!(serde_json::from_slice::<LinkProfile>(&text).expect("its own"), profile);
        }
        Err(error) => said(&error),
    }
}

fn name(number: u32) -> DeviceName {
    DeviceName::new(format!("pi-{number}")).expect("a name")
}
