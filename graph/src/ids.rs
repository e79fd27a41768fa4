//! The ids of what an operator graph has.

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(
            Clone,
            Copy,
            PartialEq,
            Eq,
            PartialOrd,
            Ord,
            Hash,
            Debug,
            Default,
            Serialize,
            Deserialize,
        )]
        pub struct $name(pub u32);
    };
}
id!(
    /// An index into [`OperatorGraph::operators`](crate::operators::OperatorGraph::operators).
    OperatorId
);
id!(
    /// An index into [`OperatorGraph::values`](crate::operators::OperatorGraph::values).
    ValueId
);
id!(
    /// An index into [`OperatorGraph::weights`](crate::operators::OperatorGraph::weights).
    WeightId
);
