// Indexes of texts for n-gram and suffix decoding: where the n-grams of a few lengths occurred last, and the
// drafts that follow from it. draft/text_index.py finds the same n-grams by searching all texts. Here hash chains
// find them, as compressors find matches: a hash table for each length maps an n-gram to the position after its
// latest occurrence, and `previous` leads from there to the earlier ones.
#include <algorithm>
#include <chrono>
#include <deque>
#include <new>
#include <vector>

#include "paceline_native.h"

namespace {

// Number of a token, counted from the first one ever appended. It may wrap, as an index holds fewer than 2^31.
using Position = uint32_t;

constexpr int32_t TEXT_END = -1;             // behind every finished text; not a token id
constexpr size_t NGRAM_OCCURRENCES = 4;      // latest occurrences of an n-gram that are drafted from
constexpr size_t NGRAM_BRANCH = 2;           // nodes of each candidate but the first; both as in text_index.py
constexpr size_t SUFFIX_OCCURRENCES = 64;    // latest occurrences of a suffix that are compared
constexpr int64_t PREFETCH = 32;             // tokens whose buckets are fetched together

// The base of the rolling hash differs in each process, so that nobody can write a text whose n-grams collide.
const uint64_t BASE =
    (static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count()) * 0x9e3779b97f4a7c15u ^
     0xd1342543de82ef95u) | 1;

uint64_t digit(int32_t token) { return static_cast<uint64_t>(static_cast<uint32_t>(token)) + 1; }

uint32_t tag_of(uint64_t hash) {
  hash = (hash ^ hash >> 32) * 0xd6e8feb86659fd93u;
  uint32_t tag = static_cast<uint32_t>(hash >> 32);
  return tag ? tag : 1;
}

struct Bucket {
  Position latest;  // the position after the latest occurrence
  uint32_t tag;     // of the n-gram; 0: the bucket is free
};

// The n-grams of one length: an open-addressing hash table with linear probing.
struct NgramTable {
  int64_t length;
  uint64_t power = 1;  // BASE^length: the weight of the token that leaves the window
  uint64_t hash = 0;   // rolling hash of the last `length` tokens of the open text
  std::vector<Bucket> buckets;
  size_t used = 0;
  std::vector<Position> previous;  // ring: by position, that after the occurrence before; itself if there is none

  explicit NgramTable(int64_t tokens) : length(tokens) {
    for (int64_t i = 0; i < tokens; i++) power *= BASE;
  }

  size_t mask() const { return buckets.size() - 1; }
  size_t next(size_t i) const { return (i + 1) & mask(); }

  void reserve(size_t ngrams) {
    if (ngrams * 4 <= buckets.size() * 3) return;
    size_t size = std::max<size_t>(buckets.size(), 64);
    while (ngrams * 4 > size * 3) size *= 2;
    std::vector<Bucket> old(size, Bucket{0, 0});
    buckets.swap(old);
    for (const Bucket& bucket : old) {
      if (!bucket.tag) continue;
      size_t i = bucket.tag & mask();
      while (buckets[i].tag) i = next(i);
      buckets[i] = bucket;
    }
  }

  // Buckets that were probed past the freed one move up into it.
  void erase(size_t freed) {
    used--;
    for (size_t i = next(freed); buckets[i].tag; i = next(i))
      if (((i - buckets[i].tag) & mask()) >= ((i - freed) & mask())) {
        buckets[freed] = buckets[i];
        freed = i;
      }
    buckets[freed].tag = 0;
  }
};

struct Draft {
  std::vector<int32_t> tokens, parents;  // parents: node numbers, -1 for the root
  double score = 0;                      // expected number of accepted tokens
  int64_t match = 0;                     // tokens of the text's end that were found

  int32_t add(int32_t token, int32_t parent) {
    tokens.push_back(token);
    parents.push_back(parent);
    return static_cast<int32_t>(tokens.size()) - 1;
  }

  int32_t child(int32_t parent, int32_t token) const {
    for (size_t i = static_cast<size_t>(parent + 1); i < tokens.size(); i++)
      if (parents[i] == parent && tokens[i] == token) return static_cast<int32_t>(i);
    return -1;
  }

  void write_to(int32_t* out) const {
    out[0] = static_cast<int32_t>(tokens.size());
    out[1] = static_cast<int32_t>(match);
    std::copy(parents.begin(), parents.end(), std::copy(tokens.begin(), tokens.end(), out + 2));
  }
};

// A node that the best-first search may add next.
struct Candidate {
  double probability;  // of its path
  int32_t parent, token;
  int64_t depth;
  size_t first, count;  // its positions in Scratch::candidate_positions
};

struct TokenCount {
  int32_t token;
  size_t count;
};

// Buffers of a lookup, kept for the next one: allocating them would take longer than the search.
struct Scratch {
  std::vector<uint32_t> tags;  // of the text's last tokens, for each table
  std::vector<Position> occurrences, candidate_positions;
  std::vector<int64_t> match_lengths;
  std::vector<TokenCount> next_tokens;
  std::vector<Candidate> candidates;
  std::vector<size_t> heap;  // of indexes into `candidates`
};
thread_local Scratch scratch;

using Text = std::vector<int32_t>;

struct TextIndex {
  const pl_lookup rule;
  std::vector<NgramTable> tables;  // shortest n-grams first
  std::vector<int32_t> stream = std::vector<int32_t>(64);  // ring of all texts, each finished one with a TEXT_END
  Position begin = 0, end = 0;
  int64_t open_tokens = 0;              // of the text that still grows
  std::deque<int64_t> finished_lengths;  // oldest first

  explicit TextIndex(const pl_lookup& given) : rule(given) {
    for (int64_t i = 0; i < given.count; i++) {
      tables.emplace_back(given.lengths[i]);
      tables.back().previous.resize(stream.size());
    }
  }

  size_t ring(Position p) const { return p & (stream.size() - 1); }
  int32_t token(Position p) const { return stream[ring(p)]; }
  bool contains(Position p) const { return static_cast<Position>(p - begin) < static_cast<Position>(end - begin); }

  // -- growing and shrinking ------------------------------------------------------------------

  // Allocates all memory that `count` more tokens and a TEXT_END take, so that nothing after it can fail.
  void reserve(int64_t count) {
    size_t size = stream.size(), needed = static_cast<Position>(end - begin) + static_cast<size_t>(count) + 1;
    for (NgramTable& table : tables) table.reserve(table.used + static_cast<size_t>(count));
    if (needed <= size) return;
    while (size < needed) size *= 2;
    auto widen = [&](auto& old) {
      auto wider = old;
      wider.resize(size);
      for (Position p = begin; p != end; p++) wider[p & (size - 1)] = old[p & (old.size() - 1)];
      old.swap(wider);
    };
    for (NgramTable& table : tables) widen(table.previous);
    widen(stream);
  }

  void append(const int32_t* tokens, int64_t count) {
    reserve(count);
    for (int64_t i = 0; i < count; i++) stream[ring(end + static_cast<Position>(i))] = tokens[i];
    for (NgramTable& table : tables)
      for (int64_t done = 0; done < count; done += PREFETCH) index_tokens(table, done, std::min(PREFETCH, count - done));
    end += static_cast<Position>(count);
    open_tokens += count;
  }

  // Indexes the n-grams that `count` tokens continue, of which the first is the token `done` after `end`.
  void index_tokens(NgramTable& table, int64_t done, int64_t count) {
    uint32_t tags[PREFETCH];
    Position first = end + static_cast<Position>(done);
    int64_t offset = open_tokens + done;  // in the text
    for (int64_t i = 0; i < count; i++) {
      tags[i] = tag_of(table.hash);
      __builtin_prefetch(&table.buckets[tags[i] & table.mask()]);
      roll(table, first + static_cast<Position>(i), offset + i);
    }
    for (int64_t i = 0; i < count; i++)
      if (offset + i >= std::max(table.length, rule.first) && offset + i < rule.stop)
        insert(table, first + static_cast<Position>(i), tags[i]);
  }

  // Moves the window of the rolling hash over the token at p, which is number `offset` of its text.
  void roll(NgramTable& table, Position p, int64_t offset) const {
    table.hash = table.hash * BASE + digit(token(p));
    if (offset >= table.length) table.hash -= digit(token(p - static_cast<Position>(table.length))) * table.power;
  }

  void insert(NgramTable& table, Position p, uint32_t tag) {
    size_t i = tag & table.mask();
    for (; table.buckets[i].tag; i = table.next(i)) {
      Position& latest = table.buckets[i].latest;
      if (table.buckets[i].tag != tag || common_suffix(latest, p, table.length) != table.length) continue;
      table.previous[ring(p)] = latest;
      latest = p;
      return;
    }
    table.buckets[i] = {p, tag};
    table.used++;
    table.previous[ring(p)] = p;
  }

  // How many tokens, at most `limit`, are the same before both positions.
  int64_t common_suffix(Position p, Position q, int64_t limit) const {
    int64_t length = 0;
    while (length < limit && token(--p) == token(--q)) length++;
    return length;
  }

  void finish_text() {
    if (!open_tokens) return;
    reserve(0);
    finished_lengths.push_back(open_tokens);
    stream[ring(end++)] = TEXT_END;
    open_tokens = 0;
    for (NgramTable& table : tables) table.hash = 0;
  }

  int64_t drop_oldest_text() {
    int64_t length = finished_lengths.front();
    finished_lengths.pop_front();
    for (NgramTable& table : tables) {
      uint64_t hash = table.hash;
      table.hash = 0;
      for (int64_t offset = 0; offset < length; offset++) {
        Position p = begin + static_cast<Position>(offset);
        if (offset >= table.length) forget(table, p, tag_of(table.hash));
        roll(table, p, offset);
      }
      table.hash = hash;
    }
    begin += static_cast<Position>(length) + 1;
    return length;
  }

  // Erases the n-gram before p if its latest occurrence is there: p is the oldest, so there is no other.
  static void forget(NgramTable& table, Position p, uint32_t tag) {
    for (size_t i = tag & table.mask(); table.buckets[i].tag; i = table.next(i))
      if (table.buckets[i].tag == tag && table.buckets[i].latest == p) return table.erase(i);
  }

  // -- looking up -----------------------------------------------------------------------------

  // How many of a text's last tokens, at most `limit`, occur before a position.
  int64_t common_suffix(const Text& text, Position p, int64_t limit) const {
    int64_t length = 0;
    limit = std::min(limit, static_cast<int64_t>(text.size()));
    while (length < limit && contains(--p) && token(p) == text[text.size() - 1 - static_cast<size_t>(length)]) length++;
    return length;
  }

  // Computes the tag of the text's last n-gram for each table, and prefetches their buckets.
  void compute_tags(const Text& text) const {
    uint64_t hash = 0, power = 1;
    int64_t length = 0;
    scratch.tags.resize(tables.size());
    for (size_t i = 0; i < tables.size(); i++) {
      if (text.size() < static_cast<size_t>(tables[i].length)) return;
      for (; length < tables[i].length; length++, power *= BASE) hash += power * digit(*(text.end() - 1 - length));
      scratch.tags[i] = tag_of(hash);
      if (tables[i].used) __builtin_prefetch(&tables[i].buckets[scratch.tags[i] & tables[i].mask()]);
    }
  }

  // Appends the positions after the `limit` latest occurrences of the text's last n-gram in tables[number].
  void find_latest(size_t number, const Text& text, size_t limit, std::vector<Position>& found) const {
    const NgramTable& table = tables[number];
    const uint32_t tag = scratch.tags[number];
    if (text.size() < static_cast<size_t>(table.length) || !table.used) return;
    for (size_t i = tag & table.mask(); table.buckets[i].tag; i = table.next(i)) {
      Position p = table.buckets[i].latest;
      if (table.buckets[i].tag != tag || common_suffix(text, p, table.length) < table.length) continue;
      for (size_t count = 0; count < limit && contains(p); count++) {
        found.push_back(p);
        Position previous = table.previous[ring(p)];
        if (previous == p) return;
        p = previous;
      }
      return;
    }
  }

  Draft draft_ngrams(const Text& text, int64_t depth, size_t max_nodes) const {
    Draft draft;
    std::vector<Position>&found = scratch.occurrences, &drafted = scratch.candidate_positions;
    drafted.clear();
    compute_tags(text);
    for (size_t i = tables.size(); i-- > 0;) {
      found.clear();
      find_latest(i, text, NGRAM_OCCURRENCES, found);
      if (!found.empty() && !draft.match) draft.match = tables[i].length;
      for (Position p : found) {
        if (std::find(drafted.begin(), drafted.end(), p) != drafted.end()) continue;
        drafted.push_back(p);
        size_t most = drafted.size() == 1 ? max_nodes : draft.tokens.size() + NGRAM_BRANCH;
        if (!add_chain(draft, p, depth, most, max_nodes)) return draft;
      }
    }
    return draft;
  }

  // Adds the `depth` tokens from p on, until the draft has `most` nodes. False if it has `max_nodes` and needs more.
  bool add_chain(Draft& draft, Position p, int64_t depth, size_t most, size_t max_nodes) const {
    Position period = end - p;  // the text repeats past its end, so that a loop goes on
    int32_t node = -1;
    for (Position step = 0; step < static_cast<Position>(depth); step++) {
      int32_t next_token = token(p + step % period), next = draft.child(node, next_token);
      if (next < 0) {
        if (draft.tokens.size() >= max_nodes) return false;
        if (draft.tokens.size() >= most) break;
        next = draft.add(next_token, node);
      }
      node = next;
    }
    return true;
  }

  // Finds the latest occurrences of the text's longest suffix (see text_index.py), and returns its length.
  int64_t find_longest_suffix(const Text& text, std::vector<Position>& found) const {
    int64_t longest = 0;
    found.clear();
    compute_tags(text);
    for (size_t i = tables.size(); i-- > 0 && found.empty();) find_latest(i, text, SUFFIX_OCCURRENCES, found);
    std::vector<int64_t>& lengths = scratch.match_lengths;
    lengths.clear();
    for (Position p : found) {
      lengths.push_back(common_suffix(text, p, rule.depth));
      longest = std::max(longest, lengths.back());
    }
    size_t kept = 0;
    for (size_t i = 0; i < found.size(); i++)
      if (lengths[i] == longest) found[kept++] = found[i];
    found.resize(kept);
    return longest;
  }

  // The likeliest continuations of the text's longest suffix, by best-first search. A token's probability is its
  // share of the occurrences that the path so far has.
  Draft draft_suffixes(Text text, int64_t max_depth, size_t max_nodes) const {
    Draft draft;
    std::vector<Position>& occurrences = scratch.occurrences;
    scratch.candidate_positions.clear();
    scratch.candidates.clear();
    scratch.heap.clear();
    draft.match = find_longest_suffix(text, occurrences);
    if (!draft.match) return draft;
    double allowed = rule.factor * static_cast<double>(draft.match) + rule.offset;
    if (allowed < static_cast<double>(max_nodes)) max_nodes = static_cast<size_t>(allowed);
    const size_t text_length = text.size();
    Candidate added{1.0, -1, 0, 0, 0, 0};  // the root
    int32_t node = -1;
    while (draft.tokens.size() < max_nodes) {
      if (added.depth < max_depth) {
        auto ends = [&](Position p) { return !contains(p) || token(p) == TEXT_END; };
        occurrences.erase(std::remove_if(occurrences.begin(), occurrences.end(), ends), occurrences.end());
        if (occurrences.empty()) {  // all texts end here: search as if the path were appended
          text.resize(text_length + static_cast<size_t>(added.depth));
          int32_t up = node;
          for (size_t i = text.size(); up >= 0; up = draft.parents[up]) text[--i] = draft.tokens[up];
          find_longest_suffix(text, occurrences);
        }
        push_candidates(added, node);
      }
      if (scratch.heap.empty()) break;
      std::pop_heap(scratch.heap.begin(), scratch.heap.end(), less_likely);
      added = scratch.candidates[scratch.heap.back()];
      scratch.heap.pop_back();
      auto first = scratch.candidate_positions.begin() + static_cast<std::ptrdiff_t>(added.first);
      occurrences.assign(first, first + static_cast<std::ptrdiff_t>(added.count));
      node = draft.add(added.token, added.parent);
      draft.score += added.probability;
    }
    return draft;
  }

  // The order of the heap: of equally likely candidates the first one wins.
  static bool less_likely(size_t a, size_t b) {
    double first = scratch.candidates[a].probability, second = scratch.candidates[b].probability;
    return first != second ? first < second : a > b;
  }

  // Pushes the tokens that follow the occurrences of `parent`, which is node number `node`.
  void push_candidates(const Candidate& parent, int32_t node) const {
    const std::vector<Position>& occurrences = scratch.occurrences;
    std::vector<TokenCount>& next_tokens = scratch.next_tokens;
    next_tokens.clear();
    for (Position p : occurrences) {
      size_t i = 0;
      while (i < next_tokens.size() && next_tokens[i].token != token(p)) i++;
      if (i == next_tokens.size()) next_tokens.push_back({token(p), 0});
      next_tokens[i].count++;
    }
    auto probability = [&](const TokenCount& next) {
      return parent.probability * (static_cast<double>(next.count) / static_cast<double>(occurrences.size()));
    };
    auto unlikely = [&](const TokenCount& next) { return probability(next) < rule.min_prob; };
    next_tokens.erase(std::remove_if(next_tokens.begin(), next_tokens.end(), unlikely), next_tokens.end());
    std::stable_sort(next_tokens.begin(), next_tokens.end(),
                     [](const TokenCount& a, const TokenCount& b) { return a.count > b.count; });
    std::vector<Position>& positions = scratch.candidate_positions;
    for (const TokenCount& next : next_tokens) {
      scratch.heap.push_back(scratch.candidates.size());
      scratch.candidates.push_back({probability(next), node, next.token, parent.depth + 1, positions.size(), next.count});
      for (Position p : occurrences)
        if (token(p) == next.token) positions.push_back(p + 1);
      std::push_heap(scratch.heap.begin(), scratch.heap.end(), less_likely);
    }
  }

  // Appends the new tokens of a query (see pl_ngrams), and returns the end of the text to look up.
  Text read_query(const int32_t* query) {
    const int32_t *tokens = query + 4, fresh = query[2], given = query[3];
    append(tokens, fresh);
    if (given) return Text(tokens + fresh, tokens + fresh + given);
    int64_t longest = tables.empty() ? 0 : tables.back().length;
    int64_t count = std::min<int64_t>(open_tokens, std::max(rule.depth, longest));
    Text text(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; i++) text[static_cast<size_t>(i)] = token(end - static_cast<Position>(count - i));
    return text;
  }
};

template <class F>
int status_of(void* index, const F& work) {
  try {
    work(*static_cast<TextIndex*>(index));
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

}  // namespace

extern "C" {

void* pl_index_open(const pl_lookup* rule) {
  try {
    return new TextIndex(*rule);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void pl_index_close(void* index) { delete static_cast<TextIndex*>(index); }

int pl_index_extend(void* index, const int32_t* tokens, int64_t count) {
  return status_of(index, [&](TextIndex& texts) { texts.append(tokens, count); });
}

int pl_index_finish(void* index) {
  return status_of(index, [](TextIndex& texts) { texts.finish_text(); });
}

int64_t pl_index_drop_oldest(void* index) { return static_cast<TextIndex*>(index)->drop_oldest_text(); }

int64_t pl_index_stream(void* index, int32_t* out) {
  const TextIndex& texts = *static_cast<TextIndex*>(index);
  for (Position p = texts.begin; out && p != texts.end; p++) *out++ = texts.token(p);
  return static_cast<Position>(texts.end - texts.begin);
}

int64_t pl_index_bytes(void* index) {
  const TextIndex& texts = *static_cast<TextIndex*>(index);
  size_t bytes = sizeof(TextIndex) + texts.stream.size() * sizeof(int32_t);
  for (const NgramTable& table : texts.tables)
    bytes += table.buckets.size() * sizeof(Bucket) + table.previous.size() * sizeof(Position);
  return static_cast<int64_t>(bytes);
}

int pl_ngrams(void* index, const int32_t* query, int32_t* draft) {
  return status_of(index, [&](TextIndex& texts) {
    texts.draft_ngrams(texts.read_query(query), query[0], static_cast<size_t>(query[1])).write_to(draft);
  });
}

int pl_suffixes(void* index, void* memory, const int32_t* query, int32_t* draft) {
  return status_of(index, [&](TextIndex& texts) {
    Text text = texts.read_query(query);
    Draft best = texts.draft_suffixes(text, query[0], static_cast<size_t>(query[1]));
    if (memory) {
      Draft other = static_cast<TextIndex*>(memory)->draft_suffixes(text, query[0], static_cast<size_t>(query[1]));
      if (other.score > best.score) best = std::move(other);
    }
    best.write_to(draft);
  });
}
}
