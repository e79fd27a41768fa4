//! Ring links between devices of one process, over real sockets.
#![allow(clippy::unwrap_used, missing_docs)]

use galaxy_common::{
    Assignment, BlockAssignment, Bytes, DeviceName, DevicePlan, Epoch, Exchange, FrameHeader,
    LinkType, Mode, Modes, Plan, Rank, SequenceNumber, Span, Strategy, WireType,
};
use galaxy_engine::link::{LinkError, Links};
use galaxy_proto::{
    ALPN_RING,
    door::{Door, Hook, Peer},
    identity::{Authority, Identity, Role},
};
use galaxy_worker::ring::{Formation, PeerAddress, Ring, RingError, hello::Answer};
use std::{sync::Arc, thread};
use tokio::net::TcpListener;
use tokio_stream::StreamExt;

fn name(text: &str) -> DeviceName {
    DeviceName::new(text).unwrap()
}

fn plan(names: &[&str]) -> Arc<Plan> {
    let assignment = Assignment {
        blocks: vec![BlockAssignment {
            layers: Span::first(1),
            heads: Span::first(1),
            columns: Span::first(1),
        }],
        row_weight: 1,
        vocabulary: Span::empty(),
    };
    let device = |text: &&str| DevicePlan {
        name: name(text),
        budget: Bytes(0),
        threads: 1,
        prefill: assignment.clone(),
        decode: assignment.clone(),
    };
    Arc::new(Plan {
        model: "m".into(),
        fingerprint: "f".into(),
        strategy: Strategy::Galaxy,
        layout: Strategy::Galaxy.layout(),
        modes: Modes::uniform(1, Mode::Tensor),
        exchange: Exchange::Ring,
        link: LinkType::Tls,
        wire: WireType::F32,
        tiles: 1,
        max_rows: 8,
        ring: names.iter().map(device).collect(),
    })
}

/// A device that takes ring links, with TLS and without.
struct Device {
    ring: Ring,
    identity: Identity,
    at: PeerAddress,
    _door: tokio::task::JoinHandle<()>,
}

async fn device(authority: &Authority, who: &str) -> Device {
    let identity = Identity::load(&authority.issue(&name(who), Role::Device, 30).unwrap()).unwrap();
    let ring = Ring::default();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let arriving = ring.clone();
    let hook: Hook = Arc::new(move |peer, stream| {
        tokio::spawn(arriving.clone().arrive(peer, stream));
    });
    let mut door = Door::open(listener, Some(&identity), Some((ALPN_RING, hook)));
    let plain = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let plain_port = plain.local_addr().unwrap().port();
    let arriving = ring.clone();
    let door = tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = door.next() => {}
                accepted = plain.accept() => {
                    let (stream, address) = accepted.unwrap();
                    let peer = Peer { identity: None, address };
                    tokio::spawn(arriving.clone().arrive_plain(peer, stream));
                }
            }
        }
    });
    Device { ring, identity, at: PeerAddress { address, plain_port }, _door: door }
}

fn formation(plan: &Arc<Plan>, peers: &[&Device], rank: u16, epoch: u64, plain: bool) -> Formation {
    let ranks = plan.ring.len() as u16;
    Formation {
        epoch: Epoch(epoch),
        rank: Rank(rank),
        digest: [7; 32],
        plan: plan.clone(),
        peers: peers.iter().map(|device| device.at.clone()).collect(),
        plain,
        links: (0..ranks).map(|from| (Rank(from), Rank((from + 1) % ranks))).collect(),
    }
}

async fn pair(epoch: u64, plain: bool) -> (Links, Links) {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::create(dir.path(), "home").unwrap();
    let (a, b) = (device(&authority, "a").await, device(&authority, "b").await);
    let plan = plan(&["a", "b"]);
    let (la, lb) = tokio::join!(
        a.ring.form(&a.identity, formation(&plan, &[&a, &b], 0, epoch, plain)),
        b.ring.form(&b.identity, formation(&plan, &[&a, &b], 1, epoch, plain)),
    );
    (la.unwrap(), lb.unwrap())
}

fn header(epoch: u64, sequence: u64, payload: usize) -> FrameHeader {
    FrameHeader {
        epoch: Epoch(epoch),
        sequence: SequenceNumber(sequence),
        transfer: 3,
        tile: 1,
        wire: WireType::F32,
        payload: payload as u32,
    }
}

async fn frames_arrive(plain: bool) {
    let (mut a, mut b) = pair(5, plain).await;
    let sizes = [0, 1, 4096, 16 * 1024 + 3, 3 << 20];
    let bytes = |n: usize| (0..n).map(|i| (i * 31 + n) as u8).collect::<Vec<u8>>();
    let sender = thread::spawn(move || {
        let (_, sender) = &mut a.senders[0];
        // Stale ones first: of an older epoch, and of an older program.
        sender.send(&header(4, 900, 70_000), &bytes(70_000)).unwrap();
        sender.send(&header(5, 0, 5), &bytes(5)).unwrap();
        for (i, size) in sizes.iter().enumerate() {
            sender.send(&header(5, 1 + i as u64, *size), &bytes(*size)).unwrap();
        }
        sender.send(&header(5, 100, 1), &[0]).unwrap();
        a
    });
    let receiver = thread::spawn(move || {
        let (_, receiver) = &mut b.receivers[0];
        for (i, size) in sizes.iter().enumerate() {
            let mut payload = vec![0; *size];
            receiver.receive(&header(5, 1 + i as u64, *size), &mut payload).unwrap();
            assert_eq!(payload, bytes(*size));
        }
        // A frame of the future is no frame of ours.
        let error = receiver.receive(&header(5, 99, 1), &mut [0]).unwrap_err();
        assert!(matches!(error, LinkError::Unexpected { .. }), "{error}");
    });
    receiver.join().unwrap();
    sender.join().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_arrive_over_tls() {
    frames_arrive(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_arrive_over_plain_tcp() {
    frames_arrive(true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_wakes_both_ends() {
    for plain in [false, true] {
        // The receiver waits for a frame that never comes, and is closed here.
        let (a, mut b) = pair(1, plain).await;
        let closers = std::mem::take(&mut b.closers);
        let blocked = thread::spawn(move || {
            b.receivers[0].1.receive(&header(1, 1, 4), &mut [0; 4]).unwrap_err()
        });
        closers.iter().for_each(|closer| closer.close());
        assert!(matches!(blocked.join().unwrap(), LinkError::Closed));
        drop(a);

        // The sender waits for a peer that takes nothing, and is closed at the other end.
        let (mut a, b) = pair(1, plain).await;
        let blocked = thread::spawn(move || {
            let payload = vec![0; 1 << 20];
            loop {
                if let Err(error) = a.senders[0].1.send(&header(1, 1, payload.len()), &payload) {
                    return error;
                }
            }
        });
        b.closers.iter().for_each(|closer| closer.close());
        drop(b);
        assert!(matches!(blocked.join().unwrap(), LinkError::Closed));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn early_arrivals_wait_for_the_placement() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::create(dir.path(), "home").unwrap();
    let (a, b) = (device(&authority, "a").await, device(&authority, "b").await);
    let plan = plan(&["a", "b"]);
    // `b` is still in epoch 1, alone, when `a` dials for epoch 2.
    let mut first = formation(&plan, &[&a, &b], 1, 1, false);
    first.links.clear();
    b.ring.form(&b.identity, first).await.unwrap();
    let early = {
        let (ring, identity) = (a.ring.clone(), a.identity.clone());
        let formation = formation(&plan, &[&a, &b], 0, 2, false);
        tokio::spawn(async move { ring.form(&identity, formation).await })
    };
    let late = b.ring.form(&b.identity, formation(&plan, &[&a, &b], 1, 2, false)).await.unwrap();
    let early = early.await.unwrap().unwrap();
    assert_eq!((early.senders.len(), early.receivers.len()), (1, 1));
    assert_eq!((late.senders.len(), late.receivers.len()), (1, 1));
    // Whoever comes for an epoch that is over is told so.
    let error = a.ring.form(&a.identity, formation(&plan, &[&a, &b], 0, 1, false)).await;
    let error = error.err().unwrap();
    let stale = matches!(&error, RingError::Refused { .. }) && error.retryable();
    assert!(stale && error.peer() == &name("b"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_epoch_is_stale_for_who_comes_late() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::create(dir.path(), "home").unwrap();
    let (a, b) = (device(&authority, "a").await, device(&authority, "b").await);
    let plan = plan(&["a", "b"]);
    b.ring.close(Epoch(1));
    let error = a.ring.form(&a.identity, formation(&plan, &[&a, &b], 0, 1, false)).await;
    let error = error.err().unwrap();
    let stale = matches!(&error, RingError::Refused { answer: Answer::Stale, .. });
    assert!(stale && error.retryable(), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_of_another_name_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::create(dir.path(), "home").unwrap();
    let (a, b) = (device(&authority, "a").await, device(&authority, "b").await);
    let intruder = device(&authority, "intruder").await;
    let plan = plan(&["a", "b"]);
    let waiting = {
        let (ring, identity) = (b.ring.clone(), b.identity.clone());
        let formation = formation(&plan, &[&a, &b], 1, 1, false);
        tokio::spawn(async move { ring.form(&identity, formation).await })
    };
    // It takes the place of `a`, and says that it is; its certificate says otherwise.
    let posing = formation(&plan, &[&intruder, &b], 0, 1, false);
    let error = intruder.ring.form(&intruder.identity, posing).await.err().unwrap();
    assert!(matches!(error, RingError::Refused { .. }), "{error}");
    assert!(!error.retryable());
    // Dialled where `a` should be, it is known as another, too.
    let towards = formation(&plan, &[&intruder, &b], 1, 2, false);
    let error = b.ring.form(&b.identity, towards).await.err().unwrap();
    assert!(matches!(error, RingError::Connect { .. }), "{error}");
    waiting.abort();
}
