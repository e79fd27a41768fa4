//! A goal of the evaluation, and whether it was reached.

use super::cells::{Lack, NOT_MEASURED, percent, shown};

/// The rule that a goal sets for its values.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Rule {
    /// Every value is at least this.
    Every(f64),
    /// At least one value is at least this.
    Any(f64),
    /// No value is above this.
    Never(f64),
}

/// The unit in which values are shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Unit {
    Times,
    Share,
}

/// A goal, with the values that are judged by it.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Goal {
    what: &'static str,
    /// The paper's figure, as text.
    paper: &'static str,
    rule: Rule,
    unit: Unit,
    values: Vec<(String, Result<f64, Lack>)>,
}

/// The column names of [`Goal::row`].
pub(super) const COLUMNS: [&str; 7] =
    ["what", "expected", "paper", "worst", "best", "reached", "section"];

impl Goal {
    /// A goal without values.
    pub(super) fn new(what: &'static str, paper: &'static str, rule: Rule, unit: Unit) -> Self {
        Self { what, paper, rule, unit, values: Vec::new() }
    }

    /// Adds the value of a cell. A value that is not finite counts as missing.
    pub(super) fn add(&mut self, cell: impl ToString, value: Result<f64, Lack>) {
        let finite = |value: f64| if value.is_finite() { Ok(value) } else { Err(Lack::Missing) };
        self.values.push((cell.to_string(), value.and_then(finite)));
    }

    /// The goal's row in the table of the summary.
    pub(super) fn row(&self, link: &str) -> [String; 7] {
        let (worst, best) = self.ends();
        let (what, paper) = (self.what.to_owned(), self.paper.to_owned());
        [what, self.expected(), paper, worst, best, self.reached(), link.to_owned()]
    }

    /// A value with one digit more than tables show, so that what is missed by little does not look reached.
    fn text(&self, value: f64) -> String {
        match self.unit {
            Unit::Times => shown(value, 3),
            Unit::Share => percent(value),
        }
    }

    fn expected(&self) -> String {
        let text = |limit: f64| match self.unit {
            Unit::Times => format!("{limit}"),
            Unit::Share => format!("{:.0}%", limit * 100.0),
        };
        match self.rule {
            Rule::Every(least) => format!("at least {} everywhere", text(least)),
            Rule::Any(least) => format!("at least {} somewhere", text(least)),
            Rule::Never(most) => format!("at most {} everywhere", text(most)),
        }
    }

    fn measured(&self) -> impl Iterator<Item = (&str, f64)> {
        self.values.iter().filter_map(|(cell, value)| Some((cell.as_str(), value.ok()?)))
    }

    /// The worst and the best value, each with its cell.
    fn ends(&self) -> (String, String) {
        let least = self.measured().min_by(|(_, a), (_, b)| a.total_cmp(b));
        let most = self.measured().max_by(|(_, a), (_, b)| a.total_cmp(b));
        let (worst, best) = match self.rule {
            Rule::Never(_) => (most, least),
            Rule::Every(_) | Rule::Any(_) => (least, most),
        };
        let end = |end: Option<(&str, f64)>| {
            end.map_or("-".to_owned(), |(cell, value)| format!("{} ({cell})", self.text(value)))
        };
        (end(worst), end(best))
    }

    /// Whether the goal was reached: yes, no or in part, and how many cells were not measured.
    pub(super) fn reached(&self) -> String {
        let holds = |value: f64| match self.rule {
            Rule::Every(least) | Rule::Any(least) => value >= least,
            Rule::Never(most) => value <= most,
        };
        let count = self.measured().count();
        let good = self.measured().filter(|(_, value)| holds(*value)).count();
        let missing = self.values.iter().filter(|(_, v)| *v == Err(Lack::Missing)).count();
        if count == 0 {
            let nothing = missing == 0 && !self.values.is_empty();
            return if nothing { "nothing to compare" } else { NOT_MEASURED }.to_owned();
        }
        let said = match self.rule {
            Rule::Any(_) if good > 0 => return "yes".to_owned(),
            _ if good == 0 => "no".to_owned(),
            _ if good < count => format!("in part: {good} of {count} cells"),
            _ if missing > 0 => "yes, where measured".to_owned(),
            _ => "yes".to_owned(),
        };
        match missing {
            0 => said,
            _ => format!("{said}; {missing} of {} cells {NOT_MEASURED}", count + missing),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn goal(rule: Rule, values: &[Result<f64, Lack>]) -> Goal {
        let mut goal = Goal::new("speed", "1.3", rule, Unit::Times);
        for (at, value) in values.iter().enumerate() {
            goal.add(at, *value);
        }
        goal
    }

    #[test]
    fn a_goal_reports_reached_missed_partly_reached_and_not_measured() {
        const NONE: Result<f64, Lack> = Err(Lack::Impossible);
        const MISSING: Result<f64, Lack> = Err(Lack::Missing);
        for (rule, values, reached) in [
            (Rule::Every(1.5), &[Ok(1.5), Ok(2.0), NONE][..], "yes"),
            (Rule::Every(1.5), &[Ok(1.4), Ok(2.0)], "in part: 1 of 2 cells"),
            (Rule::Every(1.5), &[Ok(1.4)], "no"),
            (
                Rule::Every(1.5),
                &[Ok(1.6), MISSING],
                "yes, where measured; 1 of 2 cells not measured",
            ),
            (Rule::Every(1.5), &[Ok(f64::NAN)], "not measured"),
            (Rule::Every(1.5), &[], "not measured"),
            (Rule::Every(1.5), &[NONE], "nothing to compare"),
            (Rule::Any(1.5), &[Ok(1.4), Ok(2.0), MISSING], "yes"),
            (Rule::Any(1.5), &[Ok(1.4), MISSING], "no; 1 of 2 cells not measured"),
            (Rule::Never(1.05), &[Ok(0.9), Ok(1.05)], "yes"),
            (Rule::Never(1.05), &[Ok(0.9), Ok(1.06)], "in part: 1 of 2 cells"),
        ] {
            assert_eq!(goal(rule, values).reached(), reached, "{rule:?} {values:?}");
        }
    }

    #[test]
    fn a_goal_row_names_its_worst_and_best_cell() {
        let values = [Ok(1.4), Ok(2.0), Err(Lack::Missing)];
        let row = goal(Rule::Any(1.5), &values).row("[x](#x)");
        let expected = "at least 1.5 somewhere";
        assert_eq!(row, ["speed", expected, "1.3", "1.400 (0)", "2.000 (1)", "yes", "[x](#x)"]);
        let row = goal(Rule::Never(1.05), &values).row("");
        assert_eq!(row[1..5], ["at most 1.05 everywhere", "1.3", "2.000 (1)", "1.400 (0)"]);
        let mut share = Goal::new("share", "-", Rule::Every(0.95), Unit::Share);
        share.add("A", Ok(0.949));
        assert_eq!(share.row("")[1..4], ["at least 95% everywhere", "-", "94.9% (A)"]);
        assert_eq!(goal(Rule::Every(1.0), &[]).row("")[3..5], ["-", "-"]);
    }
}
